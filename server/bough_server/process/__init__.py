"""The server's process: an event loop that survives operators' code, stop signals, and a watchdog of the loop."""
