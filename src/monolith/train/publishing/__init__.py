"""Publishing in a run: who publishes which share, from what it learned, and what holds it back."""
