from recap_ctr.cli import main

main()
