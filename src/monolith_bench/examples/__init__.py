"""The examples that `monolith demo` and `monolith tour` run. They use the library as any program would."""
