"""The explorer of retained sets: ``kvsim app``, or ``streamlit run apps/explorer.py``."""

from kvsim_explorer.main import main

main()
