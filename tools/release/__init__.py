"""What a release is made of: the wheel with the compiled library inside, and the sdist."""
