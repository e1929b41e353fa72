"""The examples that `monolith demo` and `demo tour` run. They use the library as any program would."""
