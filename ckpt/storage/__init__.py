"""What a checkpoint looks like on disk: names, dtypes, documents, array files, and how they are written and read."""
