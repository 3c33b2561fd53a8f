"""`python -m tools.ckpt_launcher`: `ckpt_launcher` from a checkout, without an installation."""
