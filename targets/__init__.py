"""What is on trial: the target protocol and its implementations."""
