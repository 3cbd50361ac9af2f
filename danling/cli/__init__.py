"""The command `danling`: one module a subcommand. Only what needs torch imports it, and only when it runs."""
