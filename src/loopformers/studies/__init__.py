"""Studies: whole experiments, from text to a report. Import the modules by name; importing this loads no torch."""
