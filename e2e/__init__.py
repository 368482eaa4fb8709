"""The harness that runs the project on a real cluster, and the scenarios it runs there."""
