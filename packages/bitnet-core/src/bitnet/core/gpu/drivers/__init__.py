"""What GPU drivers share: their interface, parallel compilation, capture and replay, staging, errors with hints."""
