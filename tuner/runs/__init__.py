"""One run: its parts, directory, record, metrics, monitors and result."""
