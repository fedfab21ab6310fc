"""What an owner of an AMD GPU runs to measure everything (scripts/rocm-acceptance): parts, each in a process of its own
with a deadline, one JSON file and one HTML page. `--simulate` runs all of it on the simulated HIP runtime."""
