"""What the process tells about itself: spans, numbers and lines of its log."""
