"""One client connection, and the exchanges on it."""
