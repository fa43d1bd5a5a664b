"""`make bench`: what the server costs, each figure beside the floor that was measured in the same run."""
