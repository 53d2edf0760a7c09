"""What ``kvsim app`` runs: a script beside a folder called ``pages`` would have Streamlit run those files themselves."""

from kvsim_explorer.main import main

main()
