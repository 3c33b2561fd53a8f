"""Places for bytes: one narrow interface, and one file for each kind of store."""
