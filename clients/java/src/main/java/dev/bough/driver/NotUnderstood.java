package dev.bough.driver;

/** A line that the driver cannot perform. */
final class NotUnderstood extends RuntimeException {
  private static final long serialVersionUID = 1;

  NotUnderstood(String message) {
    super(message);
  }
}
