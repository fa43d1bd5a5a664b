"""The job that executes an evaluation."""
