"""`monolith bench NAME`: speed and memory, each beside what the machine or a rival can do in the same run."""
