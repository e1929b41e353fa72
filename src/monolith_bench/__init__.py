"""What `monolith bench` measures, each beside a baseline in the same run."""
