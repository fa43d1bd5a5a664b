"""Events and records as lines for people; nothing here prints, asks or waits."""
