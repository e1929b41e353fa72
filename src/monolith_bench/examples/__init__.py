"""The examples that `monolith demo` and `monolith demo tour` run. They use the library as any program would."""
