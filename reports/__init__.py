"""What people see: command line, reports, trace files, the pytest plugin."""
