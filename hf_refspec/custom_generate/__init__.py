"""The Hub repository that `generate(custom_generate="user/name")` loads."""
