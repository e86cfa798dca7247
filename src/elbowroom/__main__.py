from elbowroom.cli.app import main

main()
