"""What draws: ipywidgets and anywidget live here and nowhere else."""
