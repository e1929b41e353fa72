"""The benchmarks of `monolith bench`, each compared with a baseline in the same run."""
