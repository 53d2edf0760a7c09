"""The tokens of a recording in the browser, coloured by fate or by attention; the step moves there."""
