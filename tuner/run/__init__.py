"""One run on disk and for people: its directory, record, resume, metrics and monitors."""
