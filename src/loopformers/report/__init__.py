"""Reports: one table value with many renderings, plots, and a self-contained HTML page. Import the modules by name."""
