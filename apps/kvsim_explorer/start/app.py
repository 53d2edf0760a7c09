"""What ``kvsim app`` runs: beside a script, Streamlit would take a folder called ``pages`` for pages of its own."""

from kvsim_explorer.main import main

main()
