"""What a user asks for, as frozen data (`schema`), and how it is read from YAML and options (`loader`)."""
