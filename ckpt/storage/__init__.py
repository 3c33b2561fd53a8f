"""The checkpoint on disk: names, documents and array files, how they are written and read, and the commit of a save."""
