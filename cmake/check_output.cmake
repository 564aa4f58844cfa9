# Run COMMAND (a list) and check that its output is the text of the file EXPECTED, and its exit status
# RESULT (0 unless given).
if(NOT DEFINED RESULT)
  set(RESULT 0)
endif()
execute_process(COMMAND ${COMMAND} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE errors)
file(READ "${EXPECTED}" expected)
if(NOT result STREQUAL RESULT)
  message(FATAL_ERROR "expected exit status ${RESULT}, actual ${result}\n${output}${errors}")
endif()
if(NOT output STREQUAL expected)
  message(FATAL_ERROR "expected this output:\n${expected}\nactual:\n${output}${errors}")
endif()
