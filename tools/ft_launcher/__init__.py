"""`python -m tools.ft_launcher`: `ft_launcher` from a checkout, without an installation."""
