"""Counts the calls of fsync, in all Python processes of a job."""
