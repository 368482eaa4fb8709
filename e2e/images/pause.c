/* Holds a pod's namespaces open and buries the orphans of its containers until it is told to end. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal_number)
{
	(void)signal_number;
	_exit(0);
}

static void bury(int signal_number)
{
	(void)signal_number;
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
}

int main(void)
{
	struct sigaction ending = {.sa_handler = end};
	struct sigaction burying = {.sa_handler = bury, .sa_flags = SA_NOCLDSTOP};

	if (sigaction(SIGINT, &ending, NULL) || sigaction(SIGTERM, &ending, NULL) || sigaction(SIGCHLD, &burying, NULL))
		return 1;
	for (;;)
		pause();
}
