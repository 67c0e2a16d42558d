"""fastgen-generate-for-transformers; docs/dev/command.md says where a flag or a message lives."""
