"""The events of logs, what they carry, and the values that a log leaves in its run and its session."""
