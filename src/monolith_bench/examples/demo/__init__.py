"""`monolith demo` shows a stream, a model that keeps learning, a kill and a resume."""
