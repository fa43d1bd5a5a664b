"""Who calls, and what a caller may call: functions without gRPC, which interceptors call and any other door can too."""
