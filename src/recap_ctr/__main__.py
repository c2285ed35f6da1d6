from recap_ctr.cli.main import main

main()
