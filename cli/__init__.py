"""The command line, its reports and plots."""
