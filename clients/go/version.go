package bough

// Version is the version of this client, which is also that of the server it was released with.
const Version = "0.2.0"
