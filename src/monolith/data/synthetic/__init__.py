"""Made-up data whose truth is known: a log of clicks, and a stream that drifts."""
