"""The application, its connections, and what it listens on."""
