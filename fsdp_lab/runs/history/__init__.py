"""Runs on disk: written while they train, listed, read back, pinned and deleted. One SQLite file."""
