"""Files, time and people: training, prediction, data and reports over `models`."""
