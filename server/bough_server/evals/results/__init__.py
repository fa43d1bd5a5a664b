"""What an evaluation found: verdicts, gates, comparisons, and what is left out of them."""
