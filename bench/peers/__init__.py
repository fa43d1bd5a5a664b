"""`make bench-peers`: the desk of the benchmark on other frameworks, each in a separate environment, beside Bough."""
