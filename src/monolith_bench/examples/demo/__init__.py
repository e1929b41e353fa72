"""`monolith demo`: a stream, a model that goes on learning, a kill and a resume."""
